"""What every day0 service shares; knows no model, no tensor library and no other service."""
