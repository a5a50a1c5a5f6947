"""Profiles of deployments, from options, servers, stamps and stores."""
