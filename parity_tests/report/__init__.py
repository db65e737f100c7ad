"""What a comparison leaves behind: `report.json` (the schema), `report.html` (for people), `junit.xml` (for CI)."""
