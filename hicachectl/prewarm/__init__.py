"""What to warm and in what order, from the requests that were served before."""
