"""The user's program without a graph: its lines and breaks, its modules, and when its compiled code ran."""
