"""The cases, one module for each subject. A case never skips itself and never returns early: `covers` says what it needs."""
