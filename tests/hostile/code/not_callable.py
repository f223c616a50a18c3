# call, fail: the name is there, and no function
rise = 3
