"""Make the report of `hicachectl report`: pictures of a store in one HTML file."""
