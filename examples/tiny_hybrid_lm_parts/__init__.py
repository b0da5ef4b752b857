"""The parts of `tiny_hybrid_lm.py`: models in plain torch, a serving loop over a cache stack, and
clients that chat."""
