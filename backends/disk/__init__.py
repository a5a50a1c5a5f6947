"""Local files: durable writes, bounded reads, no links followed."""
