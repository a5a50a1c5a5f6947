"""Local files: durable writes, bounded reads, directories below which no link is followed."""
