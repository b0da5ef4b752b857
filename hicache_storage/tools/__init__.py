"""What the commands for authors and operators do: a new driver's package, a diagnosis, a benchmark. No terminal in here."""
