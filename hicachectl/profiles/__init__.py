"""The profile of a deployment, from options, servers, stamps and stores."""
