"""Gates inside programs of others: their signals, processes, time limits and machines."""
