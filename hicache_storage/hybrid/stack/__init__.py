"""Complete cache of a hybrid model, built from one config."""
