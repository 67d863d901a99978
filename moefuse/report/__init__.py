"""What was fused, what was not, and why: entries, the report as text, and which report of which call a user gets."""
