"""The engines that can keep locks, and what all of them have."""
