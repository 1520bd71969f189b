"""What is different about this way of placing work?"""
