"""Local files, with durable writes, bounded reads, and directories that follow no links."""
