from .folder import Folder


def write_report(folder: Folder) -> None:
    folder.report.write_text("later")
