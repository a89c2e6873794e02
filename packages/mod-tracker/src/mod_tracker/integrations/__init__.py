"""Reports in training loops: `ReportSchedule`, and callbacks for other libraries' trainers."""
