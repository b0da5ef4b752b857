"""Adapters that put the drivers of other interfaces under the suite, called as their own engine
calls them."""
