# check, fail: ends before it is asked
raise SystemExit(0)
