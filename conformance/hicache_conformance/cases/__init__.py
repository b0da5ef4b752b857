"""The cases, one module a subject.

`covers` declares what a case needs; a case never skips itself or returns early.
"""
