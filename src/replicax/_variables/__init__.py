"""What survives between steps?"""
