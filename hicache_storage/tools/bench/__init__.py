"""How fast a store moves pages, every answer checked: what `hicache bench` measures.

A *lane* is one caller, as an engine has several. Each round of a lane writes some batches of fresh pages, looks them up, reads
them back, and removes them again; writing, looking up and reading are timed, what prepares and verifies them is not.
"""
