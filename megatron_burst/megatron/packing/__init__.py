# SPDX-License-Identifier: Apache-2.0
"""`--burst-pack documents`: a step's documents, packed anew over the data-parallel ranks."""
