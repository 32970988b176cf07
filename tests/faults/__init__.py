"""Fault injection: that locks hold while processes, networks and servers fail."""
