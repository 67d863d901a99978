"""What runs when a moefuse op is called: providers and the portable implementation."""
