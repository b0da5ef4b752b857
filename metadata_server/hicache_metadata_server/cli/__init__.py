"""`hicache metadata`: one module for each group of commands.

Modules import the library inside of their functions: `hicache --help` imports all commands, and has
to be quick, also where the packages of the server are not installed.
"""
