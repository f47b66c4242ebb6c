"""Write extensions of sandboxer in Python.

An extension is a class with three methods (sandboxer.extensions.base). The broker runs it in a
process of its own, with the host in this package (sandboxer.host), which speaks the extension
protocol and keeps the contract for it. docs/how-to/write-an-extension.md of the project is the guide.
"""

__version__ = "1.0.0"
