"""What a store holds: its scan, page groups, and the rows that list them."""
