"""What data costs, beside those who do the same work: tokenising, packing, reading rows; and how ranks wait."""
