"""Adapters that put the drivers of other interfaces under the suite.

They are called as their own engine calls them.
"""
