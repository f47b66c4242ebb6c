"""Extension classes.

The package is open: a file my_backend.py in a directory that the extension's file names in path is
sandboxer.extensions.my_backend. What stands here cannot be replaced by it.
"""
