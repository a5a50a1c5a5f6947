"""The report of `hicachectl report`: a store in pictures, as one HTML file."""
