"""Tools of many shapes, for trying whether they are the same in a sandbox. Python 3.9 runs the source of all of them."""
