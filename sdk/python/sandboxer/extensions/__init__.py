"""Extension classes. Modules of the extension's own directories appear here too:
my_backend.py there is sandboxer.extensions.my_backend, unless the name is one of ours."""
