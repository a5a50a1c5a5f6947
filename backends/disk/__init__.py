"""Files and directories of a local disk: durable, bounded, never through links."""
