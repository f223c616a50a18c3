# call, fail: no function
