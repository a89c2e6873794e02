"""The implementation under test, and the processes it runs in.

An adapter is found and imported here, says what it provides, and may have a fault put into it;
workers, ranks among them, start so that they find the judge first, and what replaced the judge is
noticed. Uses `requirements` and `mutants`.
"""
