"""What ``moefuse.explain`` runs, and the last look at a call in which experts were missed."""
