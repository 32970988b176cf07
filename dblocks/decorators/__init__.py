"""The decorator form of the locks: on functions, methods, tasks and views."""
