"""What a student's folder needs: starters, progress, examples, reports, the generated tables, the export."""
