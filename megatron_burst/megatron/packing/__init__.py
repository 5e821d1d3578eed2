"""`--burst-pack documents`: a step's documents, packed anew over the data-parallel ranks."""
