"""Which unit runs when on which rank: plans as data, proven and simulated with the standard library alone."""
