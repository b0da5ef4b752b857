# What the bridge uses of LMCache 0.5.6, so that it type-checks without it.
