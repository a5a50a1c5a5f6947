"""Get the profiles of deployments from options, servers, stamps and stores."""
