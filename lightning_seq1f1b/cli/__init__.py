"""The command line: training commands, a ready module and data module, schedules, export."""
