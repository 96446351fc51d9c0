"""What a reader opens after a run: report.html."""

from gatedlm.report.page import write_report

__all__ = ["write_report"]
