"""What a reader opens after a run or a study: report.html, study.html."""

from gatedlm.report.page import write_report
from gatedlm.report.study import write_study

__all__ = ["write_report", "write_study"]
