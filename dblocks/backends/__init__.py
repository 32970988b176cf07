"""The engines that can keep locks."""
