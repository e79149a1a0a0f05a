"""Says at the end of a session how many runs were searched."""


def pytest_terminal_summary(terminalreporter):
    reports = [r for group in terminalreporter.stats.values() for r in group]
    rows = [
        dict(report.user_properties)["search"]
        for report in reports
        if getattr(report, "when", None) == "call" and "search" in dict(report.user_properties)
    ]
    if rows:
        terminalreporter.section("adversarial search")
        for row in rows:
            terminalreporter.line(row)
