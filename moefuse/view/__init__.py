"""A report as a page: self-contained HTML, for a browser and for notebooks. Nothing here is imported before somebody asks for one."""
