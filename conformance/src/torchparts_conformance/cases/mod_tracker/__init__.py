"""Cases of the area mod-tracker."""
