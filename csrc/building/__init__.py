"""How the kernels are compiled when the package is installed. Imported by setup.py; not part of the package."""
