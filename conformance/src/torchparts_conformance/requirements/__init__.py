"""Requirements and cases, read from decorators without importing the files of cases."""
